"""The sections of the page as plain texts and places, ready for the template: one file a section, in the order of the page."""
