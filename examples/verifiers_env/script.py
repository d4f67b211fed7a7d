"""How a scripted policy wins the first game, with its second guess."""

from examples.scripted_policy import in_turn

script = in_turn("I begin in the middle: 7", "Then the middle of the upper half: 11")
