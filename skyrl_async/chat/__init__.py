"""Chat messages as token ids, through a tokenizer's own chat template."""

from skyrl_async.chat.messages import Tool, normalise_messages
from skyrl_async.chat.renderer import ChatRenderer

__all__ = ["ChatRenderer", "Tool", "normalise_messages"]
