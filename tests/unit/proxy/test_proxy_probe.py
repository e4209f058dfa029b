"""Health checks of addresses that nobody can connect to."""

import pytest
from rd2h_proxy.engine_http import make_session
from rd2h_proxy.pool import EnginePool
from rd2h_proxy.probe import Prober
from rd2h_proxy.target import ProbeState, Role, Target


@pytest.mark.parametrize("address", ["a..b:80", "[nonsense]:80", "x" * 70 + ":80", "h:99999", "h h:1"])
async def test_an_impossible_address_is_down_and_the_round_goes_on(address: str) -> None:
    pool = EnginePool(Role.DECODE, 10, lambda: 0.0)
    target = Target(Role.DECODE, address, 5, static=True)
    pool.add(target)
    async with make_session(1.0) as session:
        await Prober(session, (pool,)).probe_all()
    assert target.probe is ProbeState.DOWN
