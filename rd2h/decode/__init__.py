"""Decode side: destinations, the puller, and the connector's two halves."""
