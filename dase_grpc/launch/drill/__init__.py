"""The drill: breaks a local cluster and says what recovered how fast."""
