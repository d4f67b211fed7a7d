"""How tests start programs that they interrupt."""

AS_IN_A_TERMINAL = ("env", "--default-signal=INT")
"""Words before a program. A test run in the background hands down that interrupts are ignored. A ``preexec_fn`` would fork this process and
not only its program: the copy would end groups of torch whose threads it lacks."""
