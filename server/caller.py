"""Caller: who sent an HTTP request, and which generation answered it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Scope

if TYPE_CHECKING:
    from specdec.server.generation import Generation

_KEY = "specdec.caller"


@dataclass
class Caller:
    """What the parts of the server that see one HTTP request tell each other about it.

    `tenant` names the API key without showing it; it is empty where no keys are needed.
    """

    address: str = ""
    tenant: str = ""
    generation: Generation | None = None

    @property
    def name(self) -> str:
        """Whom limits count: the tenant, else the address, of IPv6 the network that one has."""
        if self.tenant:
            return self.tenant
        try:
            address = ipaddress.ip_address(self.address.partition("%")[0])
        except ValueError:
            return self.address
        if address.version == 6:
            return str(ipaddress.ip_network((address, 64), strict=False))
        return str(address)

    def salted(self, cache_salt: str) -> str:
        """A request's cache salt made the tenant's own; unchanged where there are no tenants.

        Example: tenant "ab" and salt "c" give "ab:c"; no other tenant and salt do, for the names
        of tenants are equally long.
        """
        return f"{self.tenant}:{cache_salt}" if self.tenant else cache_salt


def caller_of(request: Request) -> Caller:
    """Who sent a request.

    Example: `caller_of(request).tenant`.
    """
    return caller_in(request.scope)


def caller_in(scope: Scope) -> Caller:
    """The same, of an ASGI scope; whoever asks first makes it."""
    caller = scope.get(_KEY)
    if caller is None:
        caller = scope[_KEY] = Caller((scope.get("client") or ("",))[0])
    assert isinstance(caller, Caller)
    return caller
