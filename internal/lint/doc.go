// Package lint keeps the repository in order, as Go tests: who may import whom,
// which module may be used where, what a file may contain, and what gofmt, vet
// and staticcheck say. Each rule is a row of a table with its reason; a failure
// prints the reason, so nobody has to look for it.
//
//	go test ./internal/lint
//
// It holds no code that others use, and judges nothing by taste: a rule that
// needs an exception lists it, with the reason for that one.
//
//	imports_test.go   the import DAG, directly (an allow-list) and through others (a deny-list)
//	modules_test.go   modules against docs/deps.md and go.mod
//	files_test.go     one source file at a time: unsafe, init, printing, sleeping, doc comments, …
//	docs_test.go      the files that comments and pages name
//	tools_test.go     gofmt, go vet, staticcheck
package lint
