package testkit

// Rounds returns full, or race in a build with the race detector, in which a test takes several
// times as long. It is for tests whose rounds differ by a seed and also run in the build without
// the detector. race must be enough rounds to execute each kind of step.
func Rounds[T int | uint64](full, race T) T {
	if Race {
		return race
	}
	return full
}
