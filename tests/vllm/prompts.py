"""What engines of tests are asked; long enough for the prefix cache, whose blocks hold 32 tokens."""

PROMPTS = ([5, 17, 301, 44, 9], [7] * 40, [*range(3, 80)])
TOKENS = 16
BLOCK = 32
