"""Rules: from a gradient on v to a direction on v."""
