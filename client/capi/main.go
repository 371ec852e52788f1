package main

// main is never called. Go requires it in a shared library.
func main() {}
