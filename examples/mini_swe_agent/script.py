"""How a scripted policy repairs the first repository, with tool calls."""

from examples.scripted_policy import in_turn, tool_call

script = in_turn(
    "Let me look at the code and its test.\n" + tool_call("bash", command="cat stats.py test_stats.py"),
    "The test should fail.\n" + tool_call("bash", command="python3 -m unittest -q"),
    "For an even number of values, the median is the mean of the middle two.\n"
    + tool_call(
        "bash",
        command=r"sed -i 's|    return ordered\[middle\]|    if len(ordered) % 2:\n        return ordered[middle]\n"
        r"    return (ordered[middle - 1] + ordered[middle]) / 2|' stats.py",
    ),
    "Now it should pass.\n" + tool_call("bash", command="python3 -m unittest -q"),
    "Done.\n" + tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
