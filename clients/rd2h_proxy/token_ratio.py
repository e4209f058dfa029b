"""How many bytes of text make a token, learned from what engines report."""

from __future__ import annotations

_FIRST_GUESS = 4.0
_WEIGHT = 0.05
_LOWEST, _HIGHEST = 0.25, 32.0


class TokenRatio:
    """A running estimate. It only serves load estimates, so a rough one is good enough."""

    def __init__(self) -> None:
        self.bytes_per_token = _FIRST_GUESS

    def learn(self, text_bytes: int, tokens: int) -> None:
        """Takes in one prompt whose length in both units is known."""
        if text_bytes > 0 and tokens > 0:
            seen = min(_HIGHEST, max(_LOWEST, text_bytes / tokens))
            self.bytes_per_token += _WEIGHT * (seen - self.bytes_per_token)
