"""How collectives travel: a `Transport` per process group, made when the group is first used."""

from booster_runtime.collectives.transports.choice import transport_of
from booster_runtime.collectives.transports.protocol import Transport

__all__ = ["Transport", "transport_of"]
