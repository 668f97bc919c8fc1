"""What ``edgespec align`` does: a target answers prompts, and its drafter is trained on the answers."""
