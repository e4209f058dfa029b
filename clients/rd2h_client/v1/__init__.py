"""Generated messages and stubs of rd2h.meta.v1. Made by scripts/proto; do not edit."""
