"""Pure estimates: seconds and bytes of blocks, collectives, devices and steps."""
