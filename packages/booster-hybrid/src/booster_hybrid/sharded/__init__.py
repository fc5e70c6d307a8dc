"""ZeRO-3 as the data axis: parameters are sharded over the data parallel ranks, and gathered while they are used."""
