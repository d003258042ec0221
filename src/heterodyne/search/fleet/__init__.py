"""The best parallel plan over pools of alike devices: shapes of pipelines, how many of each, and what every other way would cost."""
