"""How KV gets from donors' memory into the engine's pool and back: loads before a forward, saves after a request."""
