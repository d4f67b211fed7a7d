"""The same two agents as async functions, which the trainer calls in its own process: nothing is started for a sample."""

from typing import Any

from openai import AsyncOpenAI

from examples.own_agent.tool_agent import MAX_TURNS, look


async def answer(task: Any) -> str | None:
    """Ask once; for the default task."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        reply = await client.chat.completions.create(model=task.model, messages=task.messages)
    return reply.choices[0].message.content


async def answer_with_tools(task: Any) -> str | None:
    """Answer the policy's calls until it answers without one; for task=trail."""
    messages, tools, signs = list(task.messages), task.extras["tools"], task.extras["signs"]
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=tools)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                result = look(signs, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                return message.content
    return None
