"""What a rank does when others are lost, beside meeting those that are left (engine/team.py)."""
