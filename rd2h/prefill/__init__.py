"""Prefill side: the publisher and the connector's two halves."""
