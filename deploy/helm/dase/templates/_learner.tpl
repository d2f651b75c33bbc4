{{/* The pod of a learner, the same in a Job and in a StatefulSet. Its agent is its index. */}}

{{- define "dase.learnerTemplate" -}}
{{- $learners := .Values.learners -}}
{{- $about := dict "root" . "component" "learner" "values" $learners -}}
{{- $isJob := eq $learners.mode "job" -}}
metadata:
  {{- include "dase.podMetadata" $about | nindent 2 }}
spec:
  {{- include "dase.podSpec" $about | nindent 2 }}
  {{- if $isJob }}
  restartPolicy: Never
  {{- end }}
  containers:
    - {{- include "dase.container" $about | nindent 6 }}
      env:
        - name: DASE_AGENT
          valueFrom:
            fieldRef:
              fieldPath: metadata.{{ ternary "annotations['batch.kubernetes.io/job-completion-index']" "labels['apps.kubernetes.io/pod-index']" $isJob }}
        {{- include "dase.extraEnv" $about | nindent 8 }}
      args:
        - node
        - --role=learner
        - --agent=$(DASE_AGENT)
        - --run-dir=/runs/{{ include "dase.runId" . }}
        - --resume
        {{- if $isJob }}
        - --unfinished-code=75
        {{- end }}
        {{- if not $learners.explore }}
        - --explore=false
        {{- end }}
        {{- if gt (int $learners.gpu.count) 0 }}
        - --gpu=0
        {{- end }}
        {{- include "dase.clientArgs" $about | nindent 8 }}
      ports:
        - {name: metrics, containerPort: 9500}
      {{- include "dase.probes" $about | nindent 6 }}
      volumeMounts:
        {{- include "dase.commonMounts" $about | nindent 8 }}
        - {name: results, mountPath: /runs}
        {{- if .Values.tls.enabled }}
        # Of the agents' certificates a learner sees its own alone, so it can be no other agent.
        - {name: tls, mountPath: /etc/dase/tls, subPathExpr: $(DASE_AGENT), readOnly: true}
        {{- end }}
  volumes:
    {{- include "dase.commonVolumes" $about | nindent 4 }}
    {{- if not .Values.results.perLearner }}
    - name: results
      persistentVolumeClaim: {claimName: {{ include "dase.resultsClaim" . }}}
    {{- end }}
    {{- if .Values.tls.enabled }}
    - name: tls
      projected:
        defaultMode: 0440
        sources:
          {{- range $agent := until (int $learners.count) }}
          - secret:
              name: {{ $.Values.tls.secretPrefix }}-learner-{{ $agent }}
              items:
                - {key: ca.crt, path: {{ $agent }}/ca.crt}
                - {key: tls.crt, path: {{ $agent }}/tls.crt}
                - {key: tls.key, path: {{ $agent }}/tls.key}
          {{- end }}
    {{- end }}
{{- end -}}
