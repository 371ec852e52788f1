package testkit

import (
	"os"
	"testing"
)

// Long skips a test that takes too long for make quick, which runs go test -short. why is the
// reason for the duration. Without -short the test runs. With -short and CI=true the test fails,
// because CI must run all tests.
func Long(t testing.TB, why string) {
	t.Helper()
	switch skipLong(testing.Short(), os.Getenv("CI") == "true") {
	case skip:
		t.Skip("not with -short: " + why)
	case refuse:
		t.Fatal("go test -short in CI would leave this test out: " + why)
	}
}

// verdict is the treatment of a long test.
type verdict uint8

const (
	run verdict = iota
	skip
	refuse
)

func skipLong(short, ci bool) verdict {
	switch {
	case !short:
		return run
	case ci:
		return refuse
	}
	return skip
}
