"""Model families that the tests do not know, plans for them, and what becomes of each under each (`families.py`)."""
