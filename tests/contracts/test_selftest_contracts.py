"""What `hcsim selftest` holds a machine to, over every carrier and in the simulated world."""

from __future__ import annotations

import asyncio

import pytest

from hcsim.runtime.host import Host
from hcsim.selftest.arena import Arena, TlsArena
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
