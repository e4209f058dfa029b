"""Which children Prefill publishes to: checked before any block is told to anybody.

The parameters of a request come from a client by way of a proxy. An address in them is connected to only when the meta
service vouches for it, or when it is a legacy Decode that the operator listed.
"""

from dataclasses import dataclass

from rd2h.control import ControlPlane, DecodeAddress
from rd2h.errors import TopologyError
from rd2h.params import RemoteDecode
from rd2h.topology import TpMapping


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What a child must fulfil."""

    tp_size: int
    fingerprint: bytes
    require_registered: bool
    legacy_hosts: frozenset[str]

    def address_objection(self, child: RemoteDecode, control: ControlPlane | None) -> str:
        """Why nothing at all may be sent to a child's address, not even that it fails; "" when it may."""
        if child.generation is None:
            if child.host not in self.legacy_hosts:
                return f"Decode at {child.host!r} sends no generation and is not one of legacy_decode_hosts"
        elif self.require_registered and control is None:
            return "no meta_service is configured on this Prefill engine, so no Decode can be verified"
        elif self.unseen(child, control):
            return f"no Decode of generation {child.generation} is registered at {child.host}:{child.base_port}"
        return ""

    def unseen(self, child: RemoteDecode, control: ControlPlane | None) -> bool:
        """Whether nothing stands against a child's address but that no such Decode is registered, as far as is known
        here: the registry's watch may be about to tell of it."""
        if child.generation is None or not self.require_registered or control is None:
            return False
        address = DecodeAddress(child.generation, child.host, child.base_port)
        return address not in control.registered().decode_addresses

    def objection(self, child: RemoteDecode, prompt_tokens: int) -> str:
        """Why a child is not published to although its address is good; "" when it is."""
        if child.layout_fingerprint and child.layout_fingerprint != self.fingerprint:
            return "layout fingerprint differs between Prefill and Decode"
        if child.prompt_tokens is not None and child.prompt_tokens != prompt_tokens:
            return f"the prompt has {prompt_tokens} tokens on Prefill and {child.prompt_tokens} on Decode"
        try:
            TpMapping.of(self.tp_size, child.tp_size)
        except TopologyError as error:
            return str(error)
        return ""
