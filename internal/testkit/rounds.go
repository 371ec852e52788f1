package testkit

// Rounds returns full, or race in a build with the race detector, which takes several times
// as long. It is for tests whose rounds differ by a seed and run in the plain build too.
// race rounds must execute each kind of step.
func Rounds[T int | uint64](full, race T) T {
	if Race {
		return race
	}
	return full
}
