"""The meta service of rd2h: engine registry and rendezvous over gRPC, soft state in memory."""
