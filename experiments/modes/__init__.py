"""`modes`: catch-up, one-shot and auto across relay load: the client's pause, the relay's time, the whole answer."""
