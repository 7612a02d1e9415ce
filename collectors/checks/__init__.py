"""What `gpuidle doctor` looks at. `observe` asks the node as `watch` would; the other modules judge it."""
