"""What happens: one worker a rank that obeys its list of actions."""
