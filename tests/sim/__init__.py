"""The simulator: the production cores in virtual time, from one seed, among faults, judged by oracles.

``script`` says what clients want and what the true answer is, ``world`` moves time, frames and deaths, ``clients`` are
the doors and those behind them, ``oracles`` judge, ``mutants`` are defects that must be caught. No decision of the
engine is made here.
"""
