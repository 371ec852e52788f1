// Package lint checks the repository's rules as Go tests: the allowed imports between packages, the
// places where each module may be used, the content of files, and the results of gofmt, vet and
// staticcheck. Each rule is a row of a table with its reason. A failure prints the reason.
//
//	go test ./internal/lint
//
// It has no code for other packages, and no rules of taste. A rule that needs an exception lists
// the exception with its reason.
//
//	imports_test.go   the import DAG, directly (an allow-list) and through others (a deny-list)
//	modules_test.go   modules against docs/deps.md and go.mod
//	files_test.go     one source file at a time: unsafe, init, printing, sleeping, doc comments, …
//	docs_test.go      the files that comments and pages name
//	tools_test.go     gofmt, go vet, staticcheck
package lint
