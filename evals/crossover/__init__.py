"""From how many streams on drafts stop paying."""
