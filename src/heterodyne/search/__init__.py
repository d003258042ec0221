"""The planner: balances shares, weighs alternatives on the simulator, says why it chose."""
