"""Baton and other servers, measured side by side: ``python -m baton.ops.bench.compare``.

One server after the other is started, warmed up and given the same requests, in rounds; what is compared are ratios
within a round. Nothing is pinned, nothing is tuned here: a server is what its line of the table says.
"""
