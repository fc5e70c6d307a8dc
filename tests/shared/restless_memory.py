"""A memory that has nothing but what is in use: an engine that asks for every buffer before it uses it loses no bit."""

import torch

from booster_runtime.collectives import Pending
from booster_zero.engine import Memory


class RestlessMemory(Memory):
    """Takes a buffer out of memory as soon as nobody uses it, and brings it back to another address.

    Who reads it in between gets NaN. Changes are lost where a release does not tell of them.

    Attributes:
        uses: How many uses of each buffer there are.
        reserved: Bytes that were reserved and not freed.
        faults: Buffers that a use has changed which should only read, and those that are in use between steps.
    """

    moves = True

    def __init__(self):
        super().__init__()
        self.uses, self.faults, self.reserved = {}, [], 0
        self._kept, self._here, self._changed = {}, {}, set()

    def add(self, buffer):
        key = buffer.key
        assert key not in self.uses, f"{key} was added twice"
        self._kept[key], self.uses[key] = buffer.tensor.clone(), 0
        buffer.point(None)

    def drop(self, buffer):
        del self._kept[buffer.key], self.uses[buffer.key]
        self._changed.discard(buffer.key)  # what takes its place has a copy
        self._here.pop(buffer.key, None)

    def fetch(self, buffer):
        key = buffer.key
        self.uses[key] += 1

        def arrive():
            if key not in self._here:
                self._here[key] = self._kept[key].clone()
                buffer.point(self._here[key])

        return Pending(finish=arrive)

    def release(self, buffer, *, changed):
        key = buffer.key
        self.uses[key] -= 1
        assert self.uses[key] >= 0, f"{key} was released more often than fetched"
        if key not in self._here:
            return
        if changed:
            self._kept[key] = self._here[key]
        if not self.uses[key]:
            here = self._here.pop(key)
            if not torch.equal(here.view(torch.uint8), self._kept[key].view(torch.uint8)):
                self._changed.add(key)
            self._kept[key] = self._kept[key].clone()
            here.view(torch.uint8).fill_(255)  # NaN
            buffer.point(None)

    def forget(self, buffer):
        key = buffer.key
        assert self.uses[key] == 0, f"{key} is in use"
        self._kept[key].view(torch.uint8).fill_(255)

    def reserve(self, num_bytes):
        self.reserved += num_bytes

    def free(self, num_bytes):
        self.reserved -= num_bytes
        assert self.reserved >= 0, "more was freed than reserved"

    def end_step(self):
        self.faults += [f"{key} was changed in a use that should only read" for key in self._changed]
        self.faults += [f"{key} is in use between steps" for key, uses in self.uses.items() if uses]

    def roles(self):
        return {role for _, role in self.uses}
