package testkit

// Rounds returns the number of rounds of a test: full or, in a build with the race detector, race,
// because the detector makes a test several times slower. It is for tests whose rounds differ by a
// seed and that also run without the detector. race must be enough rounds to execute each kind of
// step.
func Rounds[T int | uint64](full, race T) T {
	if Race {
		return race
	}
	return full
}
