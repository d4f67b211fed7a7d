"""The text of an answer as content, reasoning and tool calls."""
