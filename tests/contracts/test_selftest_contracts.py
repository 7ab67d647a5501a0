"""What `hcsim selftest` holds a machine to, over every carrier and in the simulated world."""

from __future__ import annotations

import asyncio

import pytest

from hcsim.collectives.algorithms import PLANNERS
from hcsim.collectives.plan import Plan, Shape
from hcsim.runtime.host import Host
from hcsim.selftest.arena import Arena, RealArena, SharedArena, TlsArena, VirtualArena
from hcsim.selftest.collectives import check_collectives, digests_of
from hcsim.selftest.contracts import CONTRACTS, Contract, ContractBroken, check_contracts, require

EACH = [contract for contracts in CONTRACTS.values() for contract in contracts]


@pytest.mark.parametrize("contract", EACH, ids=lambda contract: contract.__name__)
def test_it_holds(arena: Arena, contract: Contract) -> None:
    assert check_contracts(arena, (contract,)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("contract", EACH, ids=lambda contract: contract.__name__)
def test_it_holds_over_tls(contract: Contract) -> None:
    check_contracts(TlsArena(), (contract,))


def test_what_does_not_hold_is_named_with_its_contract(arena: Arena) -> None:
    async def seven_is_eight(arena: Arena, left: Host, right: Host) -> None:
        await left.clock.sleep(0.001)
        require(7 == 8, "7 is 8")

    with pytest.raises(ContractBroken, match="seven is eight: does not hold: 7 is 8"):
        check_contracts(arena, (seven_is_eight,))


def test_an_error_of_the_channel_is_named_with_its_contract(arena: Arena) -> None:
    async def nobody_is_there(arena: Arena, left: Host, right: Host) -> None:
        listener = await right.listen(arena.address(right))
        await listener.close()
        await asyncio.sleep(0)
        await left.connect(listener.address, timeout_s=0.2)

    with pytest.raises(ContractBroken, match="nobody is there: "):
        check_contracts(arena, (nobody_is_there,))


@pytest.mark.parametrize("kind", [RealArena, pytest.param(SharedArena, marks=pytest.mark.slow)])
def test_every_collective_has_the_bits_of_the_simulated_world(kind: type[RealArena]) -> None:
    assert check_collectives(kind, worlds=(4,)) == sum(map(len, PLANNERS.values()))


def test_a_collective_with_another_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(rank: int, shape: Shape) -> Plan:
        mine = PLANNERS["broadcast"]["tree"](rank, shape)
        return mine if rank == shape.root else Plan(())

    monkeypatch.setitem(PLANNERS["broadcast"], "nothing", backwards)
    with pytest.raises(ContractBroken, match=r"broadcast by nothing, rank . of 2: 10007 of 10007 elements are wrong"):
        digests_of(VirtualArena(("a", "b")), 2)
