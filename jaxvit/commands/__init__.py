"""The commands of ``jaxvit``, a module each; ``options`` and ``console`` hold what they share."""
