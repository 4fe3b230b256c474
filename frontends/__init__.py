"""The doors: HTTP, WebSocket, ZeroMQ; and the client SDK."""
