"""``MultiConnector`` with ``SfaRemoteD2HConnector`` in it: completion providers run before the stores beside them."""
