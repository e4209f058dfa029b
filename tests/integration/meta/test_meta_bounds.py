"""Messages at the size that the limits allow arrive."""

import time

from meta_harness import engine
from rd2h_client import MetaClient
from rd2h_client.v1.engine_registry_pb2 import LayerLayout
from rd2h_meta.config import MetaConfig
from rd2h_meta.server import MetaServer

ENGINES = 1_700
"""With layouts of 61 layers more than gRPC's usual 4 MiB."""


async def test_the_list_of_many_engines_arrives() -> None:
    server = MetaServer(MetaConfig(listen="127.0.0.1:0"))
    await server.start()
    many_layers = [
        LayerLayout(name=f"model.layers.{number}.self_attn.attn", main_block_bytes=[131_072, 16_384])
        for number in range(61)
    ]
    for number in range(ENGINES):
        entry = engine(f"d{number}")
        del entry.layout.layers[:]
        entry.layout.layers.extend(many_layers)
        server.registry.register(entry, 0.0, time.monotonic())
    try:
        async with MetaClient(server.address) as client:
            engines = await client.list_engines()
            assert len(engines) == ENGINES
            assert sum(entry.ByteSize() for entry in engines) > 4 << 20
            async for batch in client.watch_engines():
                assert len(batch.events) == ENGINES
                break
    finally:
        await server.drain()
