"""How a scripted policy does the first task, in Terminus-2's JSON format.

It says its last turn twice: Terminus-2 asks whether the task is done indeed.
"""

import json

from examples.scripted_policy import in_turn


def _turn(analysis: str, *keystrokes: str, is_complete: bool = False) -> str:
    """An answer in Terminus-2's JSON format."""
    commands = [{"keystrokes": keys, "duration": 0.3} for keys in keystrokes]
    answer = {"analysis": analysis, "plan": "One step at a time.", "commands": commands, "task_complete": is_complete}
    return json.dumps(answer)


script = in_turn(
    _turn("A fresh terminal.", "ls\n", "head -3 access.log\n"),
    _turn("The address is the first field.", "cut -d' ' -f1 access.log | sort -u | wc -l > visitors.txt\n"),
    _turn("Let me check.", "cat visitors.txt\n"),
    _turn("The file holds the number.", is_complete=True),
)
