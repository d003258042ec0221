"""Sites that meet seldom: each trains by itself, and now and then all take over an outer average of their weights."""
