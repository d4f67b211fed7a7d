"""How a scripted policy answers the first question, with two calls in a turn."""

from examples.scripted_policy import in_turn, tool_call

script = in_turn(
    "I look both prices up.\n" + tool_call("price", item="lamp") + "\n" + tool_call("price", item="chair"),
    tool_call("multiply", a=3, b=24) + "\n" + tool_call("multiply", a=2, b=65),
    "Three lamps are 72 euros, two chairs 130 euros. Together: 202",
)
