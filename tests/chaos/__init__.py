"""Runs whose processes are killed, frozen and interrupted at random, and what must hold afterwards.

    uv run -m tests.chaos --kills 100                    a real run: Ray, vLLM, every part in a process of its own
    uv run -m tests.chaos --kills 100 --generator gym    with environments played in process; by default the seed decides
    uv run -m tests.chaos --virtual --kills 30000        the real loop over modelled engines in virtual time, faults at random
    uv run -m tests.chaos --machine --examples 500       the same under a Hypothesis state machine: tens of thousands of faults

Each is seeded (``--seed``), prints its counts, writes them with ``--json FILE``, and exits with 1 where a promise was broken.
"""
