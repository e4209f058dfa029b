"""Which member's transfer parameters a finished request returns: one member's, never a mixture."""

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


class ReturnedParameters:
    """At most one member may return parameters for a request.

    Where several do, those of the first in configuration order are returned and the others are refused: logged as an
    error with the request and all names, once for each set of names and counted. Raising instead would end the engine
    over one request.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._reported: set[tuple[str, ...]] = set()

    def of(self, request_id: str, answers: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any] | None:
        """Parameters to return, from (member name, its parameters) in configuration order."""
        given = [(name, params) for name, params in answers if params is not None]
        if not given:
            return None
        names = tuple(name for name, _ in given)
        if len(given) > 1:
            self.refused += 1
            if names not in self._reported:
                self._reported.add(names)
                logger.error(
                    "rd2h: request %s: %s all return kv_transfer_params, but only one connector may; those of %s are "
                    "returned and the others refused, now and for later requests",
                    request_id,
                    " and ".join(names),
                    names[0],
                )
        return given[0][1]
