"""Client of the rd2h control plane: generated stubs and small asyncio, blocking and background clients."""
