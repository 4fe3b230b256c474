"""The decisions. Pure: nothing in here knows asyncio, zmq, torch, a clock, a random source or a file."""
