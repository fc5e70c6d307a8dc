"""How collectives travel: a `Transport` per process group, made when the group is first used."""

from booster_runtime.collectives.transports.alone import AloneTransport
from booster_runtime.collectives.transports.choice import choose, made_by, transport_of
from booster_runtime.collectives.transports.protocol import Transport

__all__ = ["AloneTransport", "Transport", "choose", "made_by", "transport_of"]
