package main

// main is required of a shared library and is never called.
func main() {}
